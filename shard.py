"""Who holds what: the parameters, gradients and optimizer states of a model on R ranks.

The matrices of a unit (the embedding, a layer, the head) lie one behind the other in flat buffers:

    weight   compute dtype      what the model multiplies with: the parameters are views of it
    grad     compute dtype for one piece a step, float32 for several (micro-batches, token chunks)
    master, exp_avg, exp_avg_sq  float32: AdamW's           2 + 2 (or 4) + 12 bytes a parameter

The model raises events (model.PlainEvents); this file answers them: a matrix product writes its
weight's gradient straight into `grad`, no temporary, no hook, no copy. Norm weights are small: they
are float32, their own master, and autograd fills their gradient.

Every rank holds everything for now (DDP): gradients are summed over the ranks when the last piece
is in, and each rank makes the same update. World size 1 takes the same path.

Legend: R ranks, P parameters.
"""
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model import Matrix, Norm, accumulation_dtype, compiled

ALIGN = 128  # elements: every view starts where the fastest matrix kernels and copies want it


@compiled
def adamw(weight: Tensor, master: Tensor, m: Tensor, v: Tensor, grad: Tensor, scalars: Tensor,
          beta1: float, beta2: float, eps: float, decay: float) -> None:
    """One AdamW update of flat tensors in place: 14 bytes read and 14 written a bf16 parameter.

    scalars: learning rate, factor on the gradient (clipping), 1 - beta1^t, 1 - beta2^t, and 1 if
    the gradients are finite, else 0: then nothing changes. They are on the device, so that
    nothing waits for the host.
    """
    lr, clip, correct1, correct2, finite = scalars.unbind()
    g = grad.to(master.dtype) * clip
    m_new = m + (1 - beta1) * (g - m)
    v_new = v + (1 - beta2) * (g * g - v)
    step = lr / correct1 * m_new / ((v_new / correct2).sqrt() + eps)
    new = torch.where(finite > 0, master * (1 - lr * decay) - step, master)
    m.copy_(torch.where(finite > 0, m_new, m))
    v.copy_(torch.where(finite > 0, v_new, v))
    master.copy_(new)
    if weight is not master:
        weight.copy_(new)


class Unit:
    """Parameters that live in flat buffers of their own and are updated together."""

    def __init__(self, modules: dict[str, nn.Module], dtype: torch.dtype, grad_dtype: torch.dtype,
                 device: torch.device, decay: float):
        wide, self.decay, self.spans, size = accumulation_dtype(dtype), decay, {}, 0
        for name, module in modules.items():
            shape = module.weight.shape
            self.spans[name] = (size, shape)
            size += -(-shape.numel() // ALIGN) * ALIGN
        self.weight = torch.zeros(size, dtype=dtype, device=device)
        self.grad = torch.zeros(size, dtype=grad_dtype, device=device)
        self.master = self.weight if dtype == wide else torch.zeros_like(self.weight, dtype=wide)
        self.exp_avg = torch.zeros(size, dtype=wide, device=device)
        self.exp_avg_sq = torch.zeros(size, dtype=wide, device=device)
        for name, module in modules.items():
            module.weight = nn.Parameter(self.view("weight", name))

    def view(self, kind: str, name: str) -> Tensor:
        """A parameter's part of one of the flat buffers, in the parameter's shape."""
        start, shape = self.spans[name]
        return getattr(self, kind)[start : start + shape.numel()].view(shape)


class States:
    """A model's parameters, gradients and AdamW states on this rank.

    model: built on any device, "meta" best: its parameters are replaced. pieces: how many times a
    matrix is used, forward and backward, between two updates. group: the ranks that share a batch.
    """

    def __init__(self, model: nn.Module, device: torch.device, dtype: torch.dtype, pieces: int,
                 group: dist.ProcessGroup, betas: tuple[float, float] = (0.9, 0.95),
                 eps: float = 1e-8, decay: float = 0.1):
        self.group, self.betas, self.eps = group, betas, eps
        wide = accumulation_dtype(dtype)
        grad_dtype = dtype if pieces == 1 else wide
        modules = {n: m for n, m in model.named_modules() if isinstance(m, (Matrix, Norm))}
        units: dict[str, dict] = {}
        for name, module in modules.items():
            key = "norms" if isinstance(module, Norm) else name.rpartition(".")[0] or name
            units.setdefault(key, {})[f"{name}.weight"] = module
        self.units, self.home, self.grads, self.seen = [], {}, {}, {}
        for key, members in units.items():
            exact = key == "norms"
            unit = Unit(members, wide if exact else dtype, wide if exact else grad_dtype, device,
                        0.0 if exact else decay)
            self.units.append(unit)
            for name, module in members.items():
                self.home[name] = unit
                if exact:
                    module.weight.grad = unit.view("grad", name)  # autograd adds to it in place
                else:
                    module.events = self
                    self.grads[module] = unit.view("grad", name)
        self.norms = self.home["norm.weight"]
        self.updates = torch.zeros((), dtype=torch.int64, device=device)
        self.scalars = torch.ones(5, dtype=wide, device=device)
        self.begin()

    # -- events of the model

    def need(self, module: nn.Module) -> Tensor:
        return module.weight

    def release(self, module: nn.Module) -> None:
        pass

    def piece(self, module: nn.Module, compute) -> None:
        """The first piece of a step overwrites what the last step left, the others add to it."""
        compute(self.grads[module], int(self.seen[module] > 0))
        self.seen[module] += 1

    # -- a step: begin, pieces, reduce, update

    def begin(self) -> None:
        self.seen = dict.fromkeys(self.grads, 0)
        self.norms.grad.zero_()

    def reduce(self) -> None:
        """Sum the gradients over the ranks."""
        for unit in self.units:
            dist.all_reduce(unit.grad, group=self.group)

    def update(self, lr: float, clip: float) -> tuple[Tensor, Tensor]:
        """AdamW with the gradient's global norm clipped to `clip` (0: off).

        Returns the norm and whether it was finite, on the device; if not, nothing was changed.
        """
        wide = self.scalars.dtype
        norms = [torch.linalg.vector_norm(u.grad, dtype=wide) for u in self.units]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        finite = norm.isfinite()
        self.updates += finite
        t = self.updates.to(wide).clamp(min=1)
        self.scalars[0].fill_(lr)
        self.scalars[1].copy_((clip / (norm + 1e-6)).clamp(max=1) if clip else torch.ones_like(norm))
        self.scalars[2].copy_(1 - self.betas[0] ** t)
        self.scalars[3].copy_(1 - self.betas[1] ** t)
        self.scalars[4].copy_(finite)
        for u in self.units:
            adamw(u.weight, u.master, u.exp_avg, u.exp_avg_sq, u.grad, self.scalars, *self.betas,
                  self.eps, u.decay)
        return norm, finite

    # -- loading and saving

    def load(self, name: str, tensor: Tensor) -> None:
        """Set one parameter, from any dtype and device."""
        unit = self.home[name]
        unit.view("master", name).copy_(tensor)
        unit.view("weight", name).copy_(unit.view("master", name))

    def full(self, name: str) -> Tensor:
        """A parameter at the optimizer's precision."""
        return self.home[name].view("master", name)

    def state_dict(self) -> dict[str, Tensor]:
        """Views by parameter name, free of padding: what a checkpoint holds and is loaded into."""
        kinds = ("master", "exp_avg", "exp_avg_sq")
        named = {f"{k}.{n}": u.view(k, n) for n, u in self.home.items() for k in kinds}
        return {**named, "updates": self.updates}

    def loaded(self) -> None:
        """After a checkpoint was read into state_dict(): the weights follow their masters."""
        for unit in self.units:
            unit.weight.copy_(unit.master)
