"""Finds the files of a model: a local folder, a name on the Hugging Face hub, or the demo model.

`model_files.find` returns a `Checkpoint` (`shared/config`) and checks config.json without loading weights.
`stored_weights` looks at names of weight files and of their tensors; `hub` is imported only for a download.
"""
