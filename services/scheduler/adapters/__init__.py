"""Adapters: which are served, and which are in each group's host memory and places.

- `registry.AdapterRegistry`: the adapters that requests may name, and adapters that only running requests still use.
- `held_adapters.HeldAdapters`: of one worker group, which adapters of a kind it has in host memory, or is to have.
- `group_prompts.GroupPrompts`: of one worker group, which prompt adapters it holds. Sequences need no place for them.
- `group_adapters.GroupAdapters`: of one worker group, which adapter is in host memory and in which place, what uses it.

`queue.adapter_waits` keeps sequences until their adapter has a place, and `workers.adapter_loads` tells workers what to
read and to drop. A place is given to another adapter once the last plan that may read it has completed. Imports
`plan_pacer` alone; `batch` and folders behind it import it.
"""
