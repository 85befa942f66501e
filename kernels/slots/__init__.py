"""State of batch slots on the device (`SlotState`), and the kernels that begin and end a decode step.

`scatter_words` writes the changes of a plan, `gather_inputs` fills the inputs of a step (`StepInputs`), and
`advance_slots` gives each slot its new token or ends it. `record_step` tells the host how far a step has come.
With several ranks, `slot_changes` carries what a step has changed of its slots to the slots of other devices.
`slot_state` and `slot_references`, the kernels in numpy, do not import Triton. The worker's `execution/` calls these,
on the CPU `slot_outcomes` alone. No import of another folder.
"""
