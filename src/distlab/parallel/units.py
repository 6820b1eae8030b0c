"""Units of a model whose weights are gathered together, and the hooks that gather and free them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from distlab.machine.torch_patches import running_backward_pass
from distlab.parallel.data import weakly
from distlab.parallel.flat_parameters import FlatParameters


class Unit:
    """The modules of a block; their parameters, in `flats`, are gathered together."""

    def __init__(self, modules: Sequence[nn.Module], flats: Sequence[FlatParameters]) -> None:
        self.modules, self.flats = modules, flats
        self._inputs: list[object] = []  # a token for each input of a forward pass that has a gradient
        self._awaited: set[object] = set()  # parts that the backward pass computes with these parameters
        self._computed: set[object] = set()  # those that it has computed
        self._backward_pass: int | None = None  # the pass that has started to compute with them

    def gather(self) -> None:
        for flat in self.flats:
            flat.gather()

    def arrive(self) -> None:
        for flat in self.flats:
            flat.arrive()

    def release(self) -> None:
        self._inputs, self._backward_pass = [], None
        for flat in self.flats:
            flat.free()

    @property
    def _is_computed_again(self) -> bool:
        """Return whether a forward pass recomputes activations for the running backward pass of these modules."""
        return self._backward_pass is not None and self._backward_pass == running_backward_pass()

    def hook(self, before: "Unit | None", after: "Unit | None") -> None:
        """Gather around the modules' forward and backward passes, with the next unit's weights posted ahead."""

        def start(_: nn.Module, args: object, kwargs: object) -> None:
            self.gather()
            self.arrive()
            if self._is_computed_again:
                return
            if after is not None:
                after.gather()
            if torch.is_grad_enabled() and has_frozen:
                for x in tensors_with_gradient([args, kwargs]):
                    token = object()
                    self._inputs.append(token)
                    x.register_hook(partial(self._done, token))

        def end(module: nn.Module, args: object, output: object) -> None:
            if self._is_computed_again:
                return
            if torch.is_grad_enabled():
                for y in tensors_with_gradient(output):
                    y.register_hook(partial(begin_backward, self._inputs))
            if module is self.modules[-1]:
                self.release()

        def begin_backward(inputs: list[object], _: Tensor) -> None:
            self.gather()
            self.arrive()
            if not self._is_computed_again:
                self._backward_pass = running_backward_pass()
                self._awaited, self._computed = set(trained), set()
                if before is not None:
                    before.gather()
            self._awaited.update(inputs)  # of each time that the forward pass has used the modules

        parameters = [p for flat in self.flats for p in flat.parameters]
        trained = [p for p in parameters if p.requires_grad]
        has_frozen = len(trained) < len(parameters)
        for module in self.modules:
            module.register_forward_pre_hook(start, with_kwargs=True)
            module.register_forward_hook(end)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(weakly(self._done))

    def _done(self, part: object, _: object = None) -> None:
        """Note that the backward pass has computed a parameter's gradient, or, if some are frozen, an input's."""
        self._computed.add(part)
        if self._backward_pass is not None and self._awaited <= self._computed:
            self.release()


def blocks_of(model: nn.Module) -> list[tuple[list[nn.Module], list[nn.Parameter]]]:
    """Return the modules whose parameters are gathered together, in model order; first, the model's shared parameters.

    Shared parameters are used by several of the others, or belong to a module with modules inside.
    """
    groups: list[list[nn.Module]] = [[]]

    def walk(module: nn.Module) -> None:
        children = list(module.children())
        if not children and module is not model:
            groups[-1].append(module)
        for child in children:
            if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
                groups.extend([[child], []])
            else:
                walk(child)

    walk(model)
    users = Counter(p for group in groups for p in {p for module in group for p in module.parameters()})
    shared = [p for p in model.parameters() if users[p] != 1]
    blocks = [([model], shared)]
    for group in groups:
        with_own = [module for module in group if any(users[p] == 1 for p in module.parameters())]
        blocks.append((with_own, [p for module in with_own for p in module.parameters() if users[p] == 1]))
    return [(modules, parameters) for modules, parameters in blocks if parameters]


def blocks_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost lists of modules."""
    for child in module.children():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            yield child
        else:
            yield from blocks_in(child)


def tensors_with_gradient(value: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries that a backward pass goes through."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_with_gradient(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_with_gradient(part)
