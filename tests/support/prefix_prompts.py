"""Prompts for tests of prefixes."""

from hypothesis import strategies as st


@st.composite
def layered_prompts(
    draw: st.DrawFn, max_prompts: int = 24, max_run: int = 7, max_token: int = 2
) -> list[list[int]]:
    """Prompts that extend one another by runs of tokens, so that trees get deep and uneven."""
    prompts: list[list[int]] = [[]]
    for _ in range(draw(st.integers(1, max_prompts))):
        base = draw(st.sampled_from(prompts))
        run = [draw(st.integers(0, max_token))] * draw(st.integers(0, max_run))
        prompts.append(base + run)
    return draw(st.permutations(prompts))
