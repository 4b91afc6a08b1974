"""A network in two: what lies below the first trained parameter, and what lies above."""

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from pubsel.messages import UsageError
from pubsel.models import Network


class Above(nn.Module):
    """The part that trains: [n, d], the outputs of everything below, flat and side by side -> logits. Its parameters
    are those of the whole network, by the same names."""

    def __init__(self, net: nn.Module, shapes: list[torch.Size]):
        super().__init__()
        self.net = net
        self.shapes = shapes

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split([shape.numel() for shape in self.shapes], dim=1)
        return self.net(*(part.unflatten(1, shape) for part, shape in zip(parts, self.shapes, strict=True)))


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not list(m.children()) or super().is_leaf_module(m, module_qualified_name)


def split(network: Network, x: Tensor) -> tuple[Callable[[Tensor], Tensor], Above]:
    """Return (below, above) with above(below(x)) = network(x) for images x [n, c, h, w]. They share the network's
    layers, so that training `above` trains the network. UsageError if the network cannot be traced (torch.fx), or if
    layers that overwrite what they are given make the parts another network."""
    try:
        graph = _Tracer().trace(network.net)
    except Exception as error:
        reason = str(error).partition("\n")[0][:100]
        raise UsageError(f"model.once=true: this network cannot be traced ({reason}): set it to false") from None

    # Above is what trains, and all that depends on it.
    upper = _above_the_first_trained(graph, network.net)
    cut = [node for node in graph.nodes if node not in upper and any(user in upper for user in node.users)]
    parameters = {node for node in cut if node.op == "get_attr"}  # frozen, of layers above, and maybe below
    cut = [node for node in cut if node not in parameters]
    lower = _part(network.net, graph, [node for node in graph.nodes if node not in upper], [], cut)

    # What passes the cut is kept for each image, so it has to belong to one image.
    with torch.no_grad():
        outputs = lower(network.normalised(x[:2].to(network.mean.device)))
    if not all(isinstance(part, Tensor) and len(part) == len(x[:2]) for part in outputs):
        raise UsageError("model.once=true: more than images' outputs passes into the trained layers: set it to false")
    shapes = [part.shape[1:] for part in outputs]

    @torch.no_grad()
    def below(images: Tensor) -> Tensor:
        return torch.cat([part.flatten(1) for part in lower(network.normalised(images))], dim=1)

    rest = _part(network.net, graph, [node for node in graph.nodes if node in upper | parameters], cut, None)
    above = Above(rest, shapes).eval()

    # A layer that overwrites its input may compute something else now; two random images show it.
    with torch.no_grad():
        images = torch.randint(256, (2, *x.shape[1:]), generator=torch.Generator().manual_seed(0), dtype=x.dtype)
        images = images.to(network.mean.device)
        z, whole = below(images), network(images)
        before = z.clone()
        equal = torch.allclose(above(z), whole, rtol=1e-3, atol=1e-4 * float(whole.abs().max()))
        same = equal and torch.equal(z, before)
    if not same:
        raise UsageError("model.once=true: cut in two, this network computes something else: set it to false")
    return below, above


def _above_the_first_trained(graph: fx.Graph, net: nn.Module) -> set[fx.Node]:
    """Return the nodes of a graph that hold trained parameters, those that depend on them, and the output."""
    trained = {name for name, p in net.named_parameters() if p.requires_grad}

    upper: set[fx.Node] = set()
    for node in graph.nodes:
        has_parameters = node.op in ("call_module", "get_attr")
        trains = has_parameters and any(name == node.target or name.startswith(f"{node.target}.") for name in trained)
        if trains or node.op == "output" or any(n in upper for n in node.all_input_nodes):
            upper.add(node)
    return upper


def _part(
    net: nn.Module, graph: fx.Graph, nodes: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node] | None
) -> fx.GraphModule:
    """Return the nodes of a graph as a separate module. outputs None: those of the graph."""
    new, copied = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copied[node] = new.placeholder(node.name)
    for node in nodes:
        copied[node] = new.node_copy(node, lambda n: copied[n])
    if outputs is not None:
        new.output(tuple(copied[node] for node in outputs))
    return fx.GraphModule(net, new)
