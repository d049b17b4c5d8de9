"""Many stacks at once (Kimi Linear, arXiv:2510.26692, section on synthetic tests)."""

from collections.abc import Sequence

import numpy as np

from archlab.data.base import check_whole
from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class Stack(Task):
    """A row of operations of three tokens: PUSH s x puts x on stack s, POP s ? takes the top of stack s, which is to be
    said at the position of s. A stack is popped only where it holds something.

    Tokens: 0 push, 1 pop, then the stacks, then the elements. The paper names 64 stacks and no other size.

    Example (2 stacks, elements from 4): inputs 0 2 5 0 2 6 1 2 6, targets - - - - - - - 6 -.

    Slices: how many elements the stack held before the pop ("depth").

    Args:
        vocab_size: stacks, two operations and elements together.
        context: tokens of a row, a multiple of three.
        n_stacks: stacks that are used at once.
        eval_tokens, test_contexts: as of every task.
    """

    name = "stack"
    slice_name = "depth"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_stacks: int,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_stacks", n_stacks)
        if vocab_size < n_stacks + 4:
            raise UsageError(f"data.vocab_size={vocab_size}: {n_stacks} stacks need at least {n_stacks + 4}")
        if context < 6 or context % 3:
            raise UsageError(f"data.context={context}: operations are of three tokens; give a multiple of 3 from 6 on")
        self.n_stacks = n_stacks
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets, slices = blank(self.context)
        held: list[list[int]] = [[] for _ in range(self.n_stacks)]
        for at in range(0, self.context, 3):
            stack, pops = int(rng.integers(self.n_stacks)), bool(rng.integers(2))
            if at == self.context - 3:  # a row asks at least once
                stack, pops = int(rng.choice([i for i, h in enumerate(held) if h] or [stack])), True
            if pops and held[stack]:
                targets[at + 1], slices[at + 1] = held[stack][-1], len(held[stack])
                inputs[at : at + 3] = 1, 2 + stack, held[stack].pop()
                continue
            element = int(rng.integers(2 + self.n_stacks, self.vocab_size))
            held[stack].append(element)
            inputs[at : at + 3] = 0, 2 + stack, element
        return inputs, targets, slices
