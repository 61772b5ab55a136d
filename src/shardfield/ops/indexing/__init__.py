"""Reading and writing by index: getitem, gather, scatter, masks, embeddings, searches."""
