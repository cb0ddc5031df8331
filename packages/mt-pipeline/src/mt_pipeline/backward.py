"""The backward of a stage in two halves: the gradient of its input now, of its weights later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

_FSDP = "RegisterPostBackwardFunctionBackward"

Pending: TypeAlias = Callable[[], None]
"""What is left of a backward; calling it adds the remaining gradients to `.grad`."""


def backward(
    roots: list[GradientEdge],
    grads: Sequence[Tensor | None],
    *,
    inputs: list[Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """Add gradients to `.grad`, as `torch.autograd.backward` does: of some inputs, or of all."""
    # The annotations of torch know neither edges as roots nor None among gradients.
    call: Any = torch.autograd.backward
    call(roots, grads, inputs=inputs, retain_graph=retain_graph)


def backward_input(
    roots: list[GradientEdge], grads: list[Tensor | None], inputs: list[Tensor]
) -> Pending | None:
    """Take the gradients of a stage's inputs, and leave its weights' for later.

    The backward graph is cut. Nodes on a path from the output to the input run now, once, and
    without their weights' part; where such a node also leads to weights, the gradient that enters
    it is kept. The second half starts there and runs what leads to weights only. Together they do
    what one backward does, by the same kernels on the same values, so all bits are the same (Qi et
    al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2, calls the halves B and W).

    Some weights get their gradient now: those used at several places of the graph, whose parts
    autograd must add up, and those of a custom `autograd.Function` (a compiled module is one too),
    which makes all its gradients in one go. If nothing is left, the graph is freed at once. That
    is so with FSDP too, which reduces a module's gradients when that of its input is there.

    Args:
        roots: The stage's outputs, or the objective.
        grads: Their gradients; None for a number.
        inputs: Leaves. Where the outputs depend on none of them everything is done later.

    Returns:
        The second half, None where nothing is left to do. The gradients of the inputs are in their
        `.grad`, which stays None where the outputs do not depend on one. Hooks on tensors inside
        the stage are called in both halves; what they return counts once.
    """
    graph = _Graph(
        [root.node for root in roots],
        [get_gradient_edge(x).node for x in inputs if x.requires_grad],
    )
    reached = [x for x in inputs if x.requires_grad and get_gradient_edge(x).node in graph.nodes]
    if not reached:
        return lambda: backward(roots, grads)
    now, later = graph.cut()
    if not later:
        backward(roots, grads)
        return None
    entries = [_Entry(node, leaves) for node, leaves in later.items()]
    backward(roots, grads, inputs=[*reached, *now], retain_graph=True)

    def weights() -> None:
        while entries:
            entries.pop(0).run()

    return weights


class _Entry:
    """A node on the path with weights of its own, and the gradient that enters it."""

    def __init__(self, node: Node, leaves: list[Tensor]) -> None:
        self._node = node
        self._leaves = leaves
        self._entering: tuple[Tensor | None, ...] | None = None
        self._handle: RemovableHandle = node.register_prehook(self._enter)

    def _enter(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if self._entering is None:
            self._entering = grads
            return None
        # Hooks on the node's output have already changed what was kept: not a second time.
        return self._entering

    def run(self) -> None:
        """Go from here to the weights."""
        grads = [(i, g) for i, g in enumerate(self._entering or ()) if g is not None]
        if grads:
            edges = [GradientEdge(self._node, i) for i, _ in grads]
            backward(edges, [g for _, g in grads], inputs=self._leaves)
        self._handle.remove()


class _Graph:
    """The backward graph below some roots.

    Args:
        roots: Where it starts.
        targets: The nodes of the inputs. Nodes that lead to one of them are on the path.
    """

    def __init__(self, roots: list[Node], targets: list[Node]) -> None:
        self.nodes: dict[Node, list[Node]] = {}
        self._roots = roots
        self._on_path = set(targets)
        # Depth first: a node is decided after all that it leads to.
        stack: list[tuple[Node, Iterator[Node]]] = []
        for root in roots:
            if root not in self.nodes:
                stack.append((root, self._children(root)))
            while stack:
                node, children = stack[-1]
                child = next(children, None)
                if child is None:
                    stack.pop()
                    if any(below in self._on_path for below in self.nodes[node]):
                        self._on_path.add(node)
                elif child not in self.nodes:
                    stack.append((child, self._children(child)))

    def _children(self, node: Node) -> Iterator[Node]:
        self.nodes[node] = [child for child, _ in node.next_functions if child is not None]
        return iter(self.nodes[node])

    def cut(self) -> tuple[list[Tensor], dict[Node, list[Tensor]]]:
        """Sort the weights by when they get their gradient.

        Returns:
            Those whose gradient comes with the input's, and the others by the one node on the path
            that leads to them.
        """
        if any(node.name() == _FSDP for node in self.nodes):
            return [], {}
        owner: dict[Node, Node | None] = {}  # of every node off the path; None: not just one
        self._claim([root for root in self._roots if root not in self._on_path], None, owner)
        for node, children in self.nodes.items():
            if node in self._on_path:
                whole = isinstance(node, torch.autograd.function.BackwardCFunction)
                aside = [child for child in children if child not in self._on_path]
                self._claim(aside, None if whole else node, owner)
        now: list[Tensor] = []
        later: dict[Node, list[Tensor]] = {}
        for leaf, claimed in owner.items():
            variable = getattr(leaf, "variable", None)
            if variable is None:
                continue
            if claimed is None:
                now.append(variable)
            else:
                later.setdefault(claimed, []).append(variable)
        return now, later

    def _claim(self, nodes: list[Node], by: Node | None, owner: dict[Node, Node | None]) -> None:
        todo = list(nodes)
        while todo:
            node = todo.pop()
            claim = by if owner.get(node, by) is by else None
            if node not in owner or owner[node] is not claim:
                owner[node] = claim
                todo.extend(self.nodes[node])
