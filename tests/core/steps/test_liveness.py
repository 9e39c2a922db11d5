"""What a graph holds, against counts by hand."""

from __future__ import annotations

import numpy as np

from mlxtune.core.steps.liveness import IN_PLACE, NEW, VIEW, Operation, held, terms, tie

ONE = np.array([1.0, 0, 0, 0])


def operation(kind: str, inputs: str, outputs: str, size: float = 1.0) -> Operation:
    return Operation(kind, tuple(inputs), tuple(outputs), (size * ONE,) * len(outputs))


def most(*graph: Operation, outputs: str, top: str = "", lag: int = 0) -> tuple[float, float]:
    """Return the most bytes that are held, and those held after `top`."""
    found = held(graph, list(outputs), top, lag)
    return float(found.moments[:, 0].max()), float(found.at_top[0])


def test_inputs_are_not_counted_and_arrays_are_freed_after_their_last_use() -> None:
    chain = [operation(NEW, a, b) for a, b in ("xa", "ab", "bc", "cd")]
    assert most(*chain, outputs="d") == (2, 0)


def test_what_the_backward_pass_needs_is_held_at_the_top() -> None:
    # x -> a -> b -> c, then back: d needs b and c, e needs a and d.
    forward = [operation(NEW, a, b) for a, b in ("xa", "ab", "bc")]
    back = [operation(NEW, "cb", "d"), operation(NEW, "da", "e")]
    assert most(*forward, *back, outputs="e", top="c") == (4, 3)


def test_views_share_their_buffer_and_elementwise_work_is_done_in_place() -> None:
    graph = [operation(NEW, "x", "a"), operation(VIEW, "a", "b"), operation(NEW, "b", "c")]
    assert most(*graph, outputs="c") == (2, 0)
    graph = [operation(NEW, "x", "a"), operation(IN_PLACE, "a", "b"), operation(NEW, "b", "c")]
    assert most(*graph, outputs="b") == (1, 0)
    # Not if another needs the array, or the result is larger.
    graph = [operation(NEW, "x", "a"), operation(IN_PLACE, "a", "b"), operation(NEW, "ab", "c")]
    assert most(*graph, outputs="c") == (3, 0)
    graph = [operation(NEW, "x", "a"), operation(IN_PLACE, "a", "b", 2.0)]
    assert most(*graph, outputs="b") == (3, 0)


def test_a_device_that_is_behind_holds_what_it_has_not_read_yet() -> None:
    chain = [operation(NEW, a, b) for a, b in ("xa", "ab", "bc", "cd", "de")]
    # Each counts 2: with 4, the inputs of the two before are held too.
    assert [most(*chain, outputs="e", lag=lag)[0] for lag in (0, 2, 4)] == [2, 3, 4]


def test_what_no_output_needs_is_not_computed() -> None:
    graph = [operation(NEW, "x", "a"), operation(NEW, "x", "b", 100.0)]
    assert most(*graph, outputs="a") == (1, 0)
    # Nor does it use what others may work in the place of.
    graph = [operation(NEW, "x", "a"), operation(NEW, "a", "b"), operation(IN_PLACE, "a", "c")]
    assert most(*graph, outputs="c") == (1, 0)


def test_placeholders_are_replaced_by_what_they_stand_for() -> None:
    graph = [operation(NEW, "x", "a"), operation(NEW, "", "p"), operation(NEW, "pq", "b")]
    tied = tie(graph, {"p": "q", "q": "a"})
    assert [(each.inputs, each.outputs) for each in tied] == [
        (("x",), ("a",)),
        (("a", "a"), ("b",)),
    ]


def test_the_largest_moment_depends_on_the_load() -> None:
    sizes = [np.array([0, 10.0, 0, 0]), np.array([0, 0, 0, 1.0])]
    graph = [
        Operation(NEW, ("x",), (name,), (size,)) for name, size in zip("ab", sizes, strict=True)
    ]
    graph.append(Operation(NEW, ("a",), ("c",), (0 * ONE,)))
    moments = held([graph[0], graph[2]], ["c"], "", 0).moments
    assert (moments @ terms(tokens=7, lines=2, width=3)).max() == 70
    moments = held([graph[1]], ["b"], "", 0).moments
    assert (moments @ terms(tokens=7, lines=2, width=3)).max() == 2 * 3**2
