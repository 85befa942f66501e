import triton

from blockyard.kernels.int_math import ceil_div, next_power_of_2


def test_as_triton_counts() -> None:
    for a in range(1, 300):
        assert next_power_of_2(a) == triton.next_power_of_2(a)
        assert [ceil_div(a, b) for b in (1, 7, 64)] == [triton.cdiv(a, b) for b in (1, 7, 64)]
    assert ceil_div(0, 8) == 0
