"""Steps of a worker with several ranks: the leader decides and samples, and followers compute their part.

- `LeaderModel`, `LeaderMetadata`, `LeaderStore`, `LeaderPool`: stand in the places of a model, the builder of its
  attention, host memory for blocks and changes of the KV pool. They send what is asked of them to the followers, and
  then do it.
- `DeviceMirror` tells followers with GPUs of slots and CUDA graphs. `SentChanges` and `ReceivedChanges`: what steps
  change of the slots comes to them beside the steps, so that stages compute steps of other sequences meanwhile.
- `Follower`: does what comes. It knows no plan, no slot and no clock: only what the leader sends.
- `MovableExperts`: the experts of a rank that has them whole: counts how often they are chosen, and moves them.
  `ExpertBalancer` is the leader's: it decides which move, by `parallel.expert_balance`.

Which adapter each row of a step has travels with the step, as do vectors of prompt adapters. LoRA adapters are loaded
and placed between steps (`lora/ranks`).

Both ends call the same collectives in the same order, because the stream is ordered. Nothing here reads a clock or
draws numbers (tested): ranks would differ. Without followers none of this is made.
"""
