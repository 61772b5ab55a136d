"""Sort, topk, order statistics, unique, cumulative scans."""
