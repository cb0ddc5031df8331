"""The backward of a stage in two halves: the input's gradient now, the weights' gradients later."""

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
"""The rest of a backward; calling it adds the remaining gradients to `.grad`."""


def backward(
    roots: list[GradientEdge],
    grads: Sequence[Tensor | None],
    *,
    inputs: list[Tensor] | None = None,
    retain_graph: bool = False,
) -> None:
    """Add gradients to `.grad`, as `torch.autograd.backward` does, for some inputs or for all."""
    # The annotations of torch know neither edges as roots nor None among gradients.
    call: Any = torch.autograd.backward
    call(roots, grads, inputs=inputs, retain_graph=retain_graph)


def backward_input(
    roots: list[GradientEdge], grads: list[Tensor | None], inputs: list[Tensor]
) -> Pending | None:
    """Compute the gradients of a stage's inputs, and leave the weight gradients for later.

    The backward graph is cut. Nodes on a path from the output to the input run now, once, and
    skip their weight gradients; where such a node also leads to weights, the gradient that enters
    it is kept. The second half starts from these gradients and runs only the nodes that lead to
    weights. Both halves together call the same kernels on the same values as one backward, so the
    result is bit for bit the same (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv
    2401.10241, section 2, calls the halves B and W).

    Some weights get their gradient now: weights used at several places of the graph, because
    autograd has to add their parts up, and weights of a custom `autograd.Function` (a compiled
    module is one too), because it computes all its gradients in one call. The same holds for FSDP,
    which reduces a module's gradients as soon as its input's gradient is there. If no work is
    left, the graph is freed at once.

    Args:
        roots: The stage's outputs, or the objective.
        grads: Their gradients; None for a scalar.
        inputs: Leaves. If the outputs depend on none of them, the whole backward happens later.

    Returns:
        The second half; None if no work is left. The inputs' gradients are in their `.grad`, which
        stays None for an input that the outputs do not depend on. Hooks on tensors inside the
        stage are called in both halves; their return values count once.
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
    """A node on the path that also leads to weights, and the gradient that enters it."""

    def __init__(self, node: Node, leaves: list[Tensor]) -> None:
        self._node = node
        self._leaves = leaves
        self._entering: tuple[Tensor | None, ...] | None = None
        self._handle: RemovableHandle = node.register_prehook(self._enter)

    def _enter(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if self._entering is None:
            self._entering = grads
            return None
        # Hooks on the node's output have already changed the gradient that was kept; returning it
        # keeps them from changing it a second time.
        return self._entering

    def run(self) -> None:
        """Run the backward from this node to its weights."""
        grads = [(i, g) for i, g in enumerate(self._entering or ()) if g is not None]
        if grads:
            edges = [GradientEdge(self._node, i) for i, _ in grads]
            backward(edges, [g for _, g in grads], inputs=self._leaves)
        self._handle.remove()


class _Graph:
    """The backward graph that starts from some roots.

    Args:
        roots: Nodes that the graph starts from.
        targets: Nodes of the inputs. A node that leads to one of them is on the path.
    """

    def __init__(self, roots: list[Node], targets: list[Node]) -> None:
        self.nodes: dict[Node, list[Node]] = {}
        self._roots = roots
        self._on_path = set(targets)
        # Depth first, without recursion: a node is decided after all its children.
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
        """Sort the weights by the time at which they get their gradient.

        Returns:
            The weights whose gradient comes together with the input's, and the other weights by
            the one node on the path that leads to them.
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
