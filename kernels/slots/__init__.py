"""State of batch slots on the device (`slot_state.SlotState`), so that steps run ahead of the host.

`scatter_words` writes the host's changes into it, `gather_inputs` begins a step (`StepInputs`), and `advance_slots`
ends it: each slot takes its token or ends (`SlotOutcome`). No import of another folder.
"""
