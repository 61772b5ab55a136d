"""Models that the tutorials use, written for one process and for many."""
