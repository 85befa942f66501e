"""Which adapter a sequence waits for, among groups that hold, load and refuse some."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from blockyard.services.scheduler.queue.adapter_waits import first_lacking

PROMPT, LORA = 1, 2


@dataclass
class Group:
    held: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)

    def can_start(self, adapter: int) -> bool:
        return adapter in self.held - self.refused

    def load(self, adapter: int) -> None:
        self.held.add(adapter)


def test_the_first_adapter_that_no_group_has_beside_those_before_it() -> None:
    prompt, lora, both = Group({PROMPT}), Group({LORA}), Group({PROMPT, LORA})
    assert first_lacking((), []) is None
    assert first_lacking((LORA,), []) == LORA
    assert first_lacking((LORA,), [prompt, lora]) is None
    assert first_lacking((PROMPT, LORA), [lora]) == PROMPT
    assert first_lacking((PROMPT, LORA), [prompt, lora]) == LORA, "each is held, and not by one group"
    assert first_lacking((PROMPT, LORA), [prompt, lora, both]) is None


adapters = st.sets(st.sampled_from([PROMPT, LORA]))


@settings(deadline=None)
@given(st.lists(st.builds(Group, adapters, adapters), min_size=1, max_size=4), st.integers(0, 3))
def test_a_wait_ends_if_a_group_can_have_all(groups: list[Group], rounds: int) -> None:
    """Groups load the prompt adapter by themselves, sooner or later, and the LoRA adapter while it is waited for."""
    for _ in range(rounds):
        lacking = first_lacking((PROMPT, LORA), groups)
        for group in groups if lacking is not None else ():
            group.load(lacking)
    for group in groups:
        group.load(PROMPT)
    if first_lacking((PROMPT, LORA), groups) == LORA:
        for group in groups:
            group.load(LORA)
    assert (first_lacking((PROMPT, LORA), groups) is None) == any(not group.refused for group in groups)
