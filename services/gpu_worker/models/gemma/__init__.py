"""The Gemma families: norms with a unit offset before and after, and soft caps or two rotations."""
