"""Helpers that several families use: probing torch for shapes and errors, broadcasting layouts, blockwise work."""
