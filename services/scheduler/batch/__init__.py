"""Decides what each step computes, and applies its result.

Called by `core.Scheduler`: `StepPlanner.plan` builds the plan of a step, `StepResults.apply` takes its result.

- `step_planner`: decodes, then prefills; writes the plan. `prefill_planner`: starts waiting sequences, preempts for
  them, and divides the prefill tokens of a step (`partial_prefill_limits`, `fair_step_limiter`, `admission_delay`).
- `decode_batch`: the sequences that decode in step, so that a step costs the same however many there are.
- `plan_builder`: a plan while it is built, and its record until the result. `plan_pacer`: when the next plan is sent.

Planners and results import from queue, kv_cache, workers and sequences; `decode_batch`, `plan_builder` and
`plan_pacer` are imported by workers and import only sequences.
"""
