"""Decides what each step computes, and applies its result.

`StepPlanner.plan` builds the plan of a step: decodes, then prefills. `ResultApplier.apply` takes its result.

- `prefill_planner`: starts waiting sequences, preempts for them, and divides the prefill tokens of a step by
  `partial_prefill_limits` and `fair_step_limiter`. `prefill_delay` delays them. The core makes these three only where
  settings or policy need them.
- `encoder_planner`, `packed_results`: the same of models without KV: their steps take slices of texts.

Called by the core. Imports all other folders.
"""
