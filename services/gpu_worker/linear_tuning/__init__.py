"""Picks the kernel of each linear layer and batch size on a GPU by measuring, and keeps the result on disk."""
