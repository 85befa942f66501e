"""Adapters for more than one service: PEFT's folders. Imports no torch.

`adapter_config` reads the config of a LoRA adapter, `prompt_config` that of a prompt adapter. `pattern_check` bounds
the time of a config's regular expressions, by a process that runs `match_names`. `adapter_folder` finds and reads the
files of a folder for workers; the launcher calls its `check_folder` for adapters that a server starts with.
"""
