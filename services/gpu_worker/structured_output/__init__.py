"""Masks of structured output: a matcher process beside the worker fills them, the worker applies them to logits.

1. `matcher_processes.MatcherProcesses` (worker) opens each constrained slot at a matcher process of its grammar's
   engine, and starts that process if there is none. Each engine has processes of its own, so a slow engine delays its
   own slots alone: one, or several if a device samples. `matcher_client` starts one, `matcher_frames` are the messages.
2. `matcher_process` (its main loop) gives the slot to `slot_matchers.SlotMatchers`, which compiles the grammar in a
   thread and keeps a `mask_program.MaskProgram` for the slot; `reasoning_ends` finds the text behind which one begins.
3. Sampled tokens and masks pass through shared memory: `mask_memory` describes every word of it.
4. On the CPU `sampling.cpu_sampler` waits for the masks of a step. On a GPU kernels do: `execution.cuda.device_masks`
   gives them the shared memory, and `execution.device_loop` reports rows without a mask. Such a row samples nothing,
   and computes its position again in the next step.

A process that ends is started again with the tokens so far (`matcher_processes`); it ends with the worker. A grammar
that ends its process twice at the same token fails its choice. Imports no torch; `shared/grammars` has the engines.
"""
