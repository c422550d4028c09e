"""The pretend device keeps CUDA's rules: it refuses what a GPU refuses,
and computes what a GPU computes."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from pretend_cuda import DeviceTensor, needs_pretend_device, pretend_cuda
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from rlcli.testing.ranks import run_on_ranks

pytestmark = needs_pretend_device


@pytest.fixture
def cuda():
    with pretend_cuda() as device:
        yield device


@pytest.fixture
def x(cuda):
    return torch.arange(12.0).view(3, 4).to(cuda)


HOST = torch.arange(12.0).view(3, 4)
ROWS = torch.tensor([0, 2])

MIXED = {
    "sum": lambda x: x + HOST,
    "matrix product": lambda x: x @ torch.ones(4, 2),
    "concatenation": lambda x: torch.cat([x, HOST]),
    "concatenation with a number": lambda x: torch.stack([x.sum(), torch.tensor(1.0)]),
    "gather": lambda x: x.gather(1, torch.zeros(3, 1, dtype=torch.int64)),
    "index_select": lambda x: x.index_select(0, ROWS),
    "scatter": lambda x: x.scatter_add_(0, torch.zeros(1, 4, dtype=torch.int64), HOST[:1]),
    "embedding": lambda x: nn.functional.embedding(ROWS, x),
    "where": lambda x: torch.where(HOST > 1, x, 0.0),
    "masked_fill": lambda x: x.masked_fill(HOST > 1, 0.0),
    "masked_select": lambda x: x.masked_select(HOST > 1),
    "searchsorted": lambda x: torch.searchsorted(x[0], HOST[0]),
    "isin": lambda x: torch.isin(x, HOST),
    "lerp into the host": lambda x: HOST.clone().lerp_(x, 0.5),
    "a device number into a host number": lambda x: torch.tensor(1.0).add_(x.sum()),
    "host rows by device index": lambda x: HOST[ROWS.to(x.device)],
    "host mask by device": lambda x: HOST[x > 1],
    "host values into device rows": lambda x: x.index_put_((ROWS,), HOST[:2]),
    "cross entropy": lambda x: nn.functional.cross_entropy(x, torch.zeros(3, dtype=torch.int64)),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(
        x[None], HOST[None], HOST[None]
    ),
    "fused step": lambda x: torch._fused_adamw_(
        [x],
        [HOST],
        [x],
        [x],
        [],
        [],
        lr=1,
        beta1=0.9,
        beta2=0.9,
        weight_decay=0,
        eps=1,
        amsgrad=False,
        maximize=False,
    ),
    "another generator": lambda x: torch.rand(3, device=x.device, generator=torch.Generator()),
    "a device generator on the host": lambda x: torch.rand(3, generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("case", MIXED)
def test_host_and_device_tensors_cannot_be_mixed(x, case):
    with pytest.raises(RuntimeError, match=r"same device|device type|is on cpu|expected device"):
        MIXED[case](x)


ALLOWED = {
    "a host number": lambda x: x + torch.tensor(2.0),
    "a host number on the left": lambda x: torch.tensor(2.0) * x,
    "a host number where": lambda x: torch.where(x > 1, x, torch.tensor(0.0)),
    "host index": lambda x: x[ROWS],
    "host mask": lambda x: x[HOST > 3],
    "list": lambda x: x[[2, 0]],
    "list of truths": lambda x: x[:, [True, False, True, False]],
    "slices": lambda x: x[1:, None, ..., ::2],
    "assignment of a host number": lambda x: x.clone().index_put_((ROWS,), torch.tensor(7.0)),
    "assignment by list": lambda x: _assigned(x.clone(), [0, 1], 5.0),
    "copy from the host": lambda x: x.clone().copy_(HOST + 1),
    "to another tensor": lambda x: HOST.to(x),
    "type_as": lambda x: HOST.double().type_as(x),
    "tensor": lambda x: torch.tensor([[1.0, 2.0]], device=x.device),
    "tensor of device numbers": lambda x: torch.tensor([x[0, 1], x[1, 2]], device="cuda"),
    "as_tensor": lambda x: torch.as_tensor([1, 2], device="cuda:0"),
    "factories": lambda x: torch.zeros_like(x) + torch.ones(3, 4, device=0) + x.new_full((4,), 2.0),
    "random numbers": lambda x: torch.rand(
        2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    ),
    "sort": lambda x: x.sort(descending=True).values,
    "in place": lambda x: x.clone().mul_(2).clamp_(max=9),
    "normalisation": lambda x: nn.functional.layer_norm(x, (4,)),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_operations_that_cuda_allows_stay_on_the_device(x, case):
    result = ALLOWED[case](x)
    assert result.device == torch.device("cuda:0")
    assert result.is_cuda
    assert isinstance(result, DeviceTensor)


@pytest.mark.parametrize(
    "case", [name for name in ALLOWED if name not in ("random numbers", "factories")]
)
def test_operations_give_the_same_numbers_as_on_the_host(cuda, case):
    torch.testing.assert_close(
        ALLOWED[case](HOST.to(cuda)).cpu(), ALLOWED[case](HOST).cpu(), check_device=False
    )


def _assigned(tensor, index, value):
    tensor[index] = value
    return tensor


def test_tensors_move_between_host_and_device(x, cuda):
    assert x.to("cuda") is x
    assert x.cuda() is x
    assert x.cpu().device.type == "cpu"
    assert type(x.cpu()) is torch.Tensor
    assert x.to("cpu", torch.float64).dtype is torch.float64
    assert x.to(torch.float16).device == cuda
    assert x.type() == "torch.cuda.FloatTensor"
    assert x.data.device == x.detach().device == cuda
    moved = HOST.to(cuda)
    moved += 1
    assert HOST[0, 0] == 0


def test_numpy_is_refused_without_a_copy_to_the_host(x):
    with pytest.raises(TypeError, match="copy the tensor to host memory first"):
        x.numpy()
    assert x.cpu().numpy().shape == (3, 4)
    assert (x.tolist(), float(x[0, 1]), f"{x[0, 2]:.1f}") == (HOST.tolist(), 1.0, "2.0")
    assert "device='cuda:0'" in repr(x)


def test_a_device_context_places_new_tensors(cuda):
    with torch.device("cuda"):
        new = [
            torch.zeros(2),
            torch.tensor([1, 2]),
            torch.as_tensor(3),
            torch.ones(1, device="cpu"),
            torch.empty(1),
        ]
    assert [tensor.device.type for tensor in new] == ["cuda", "cuda", "cuda", "cpu", "cuda"]
    with torch.device("meta"):
        assert torch.tensor([1]).is_meta
    assert torch.zeros(1).device.type == "cpu"


def test_only_host_tensors_can_be_pinned(x):
    assert HOST.pin_memory().is_pinned()
    assert torch.empty(2, pin_memory=True).is_pinned()
    assert not HOST.is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()


def test_gradients_flow_between_host_and_device(cuda):
    host = HOST.clone().requires_grad_()
    device = HOST.to(cuda).requires_grad_()
    ((host.to(cuda) * device).sum() + (device.cpu() * host).sum()).backward()
    assert host.grad.device.type == "cpu"
    assert device.grad.device == cuda
    torch.testing.assert_close(device.grad.cpu(), 2 * HOST)


def test_hooks_of_the_backward_pass_can_use_the_device(cuda):
    seen = []

    def hook(grad):
        seen.extend(
            [torch.zeros(2, device="cuda"), torch.tensor([1.0], device="cuda:0"), grad.to("cuda")]
        )

    weight = torch.ones(2, device=cuda, requires_grad=True)
    weight.register_hook(hook)
    (weight * 2).sum().backward()
    torch.autograd.grad((weight * 2).sum(), weight)
    assert [one.device for one in seen] == [cuda] * 6


def test_a_parameter_can_be_cast_while_it_is_referenced(cuda):
    module = nn.Linear(4, 4).to(cuda)
    observer, output = weakref.ref(module.weight), module(torch.ones(1, 4, device=cuda)).sum()
    module.to(cuda)
    output.backward()
    assert module.weight.grad.device == cuda
    module.half()
    assert observer() is module.weight
    assert module.weight.dtype is torch.float16


def test_a_moved_module_keeps_its_parameters(cuda):
    module = nn.ModuleDict({"one": nn.Linear(4, 4, bias=False), "two": nn.Linear(4, 4, bias=False)})
    module["two"].weight = weight = module["one"].weight
    weight.of_user = "kept"
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    for device in (cuda, torch.device("cpu"), cuda):
        module.to(device)
        weight.grad = torch.ones(4, 4, device=device)
        optimizer.zero_grad(set_to_none=False)
        assert module["one"].weight is module["two"].weight is weight
        assert (weight.device, weight.grad.device, weight.of_user) == (device, device, "kept")
        assert isinstance(weight, nn.Parameter)
    copied = copy.deepcopy(module)
    assert copied["one"].weight is copied["two"].weight
    assert copied["one"].weight.device == cuda
    assert copied["one"].weight.of_user == "kept"


def test_a_meta_module_can_be_materialised_on_a_device(cuda):
    for device in (torch.device("cpu"), cuda):
        with torch.device("meta"):
            module = nn.Linear(4, 4)
        weight = module.weight
        module.to_empty(device=device)
        assert module.weight is weight
        assert weight.device == device


def test_the_data_of_a_parameter_can_be_a_view(cuda):
    weight = nn.Parameter(torch.ones(3, 4))
    weight.data = weight.data.to(cuda)
    buffer = torch.zeros(24, device=cuda)
    weight.data = buffer[:12].view(3, 4)
    buffer += 3
    assert float(weight.detach().sum()) == 36
    (weight * 2).sum().backward()
    assert weight.grad.device == cuda


def test_training_gives_the_same_losses_as_on_the_host(cuda):
    def losses(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        data = HOST.to(device)
        recorded = []
        for _ in range(3):
            loss = (checkpoint(model, data, use_reentrant=False) - 1).square().mean()
            loss.backward()
            recorded.append(float(loss.detach()))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert all(
            m.device == torch.device(device) for s in optimizer.state.values() for m in s.values()
        )
        return recorded

    assert losses(cuda) == pytest.approx(losses("cpu"), rel=1e-5)


def test_autocast_casts_the_same_operations_as_on_cuda(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = x @ x.t()
        assert product.dtype is torch.bfloat16
        assert product.softmax(-1).dtype is torch.float32  # on a CPU softmax stays in bfloat16
        assert (HOST @ HOST.t()).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x.t()).dtype is torch.float32


def test_host_and_device_have_separate_random_streams(cuda):
    torch.manual_seed(3)  # seeds both
    host, state = torch.rand(4), torch.cuda.get_rng_state()
    torch.manual_seed(3)
    first = torch.rand(4, device=cuda)
    second = torch.empty(4, device=cuda).uniform_()
    assert torch.equal(torch.rand(4), host)  # drawing on the device left the host's stream alone
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device=cuda), first)


def test_allocated_memory_is_counted_per_storage(cuda):
    assert torch.cuda.memory_allocated() == 0
    big = torch.zeros(1000, device=cuda)
    views = [big[:10], big.view(10, 100), big.detach()]
    assert torch.cuda.memory_allocated() == 4000
    doubled = big.double()
    assert torch.cuda.memory_allocated() == 12000
    del big, doubled
    gc.collect()
    assert torch.cuda.memory_allocated() == 4000
    assert torch.cuda.max_memory_allocated() == 12000
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 12000
    torch.cuda.reset_peak_memory_stats()
    del views
    assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 4000)


def test_allocations_beyond_the_memory_fail():
    with pretend_cuda(memory=1000) as device:
        tensor = torch.zeros(200, device=device)
        assert torch.cuda.mem_get_info() == (200, 1000)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 400 bytes"):
            tensor[:100].clone()


def test_several_devices_are_kept_apart():
    with pretend_cuda(devices=2):
        assert torch.cuda.device_count() == 2
        torch.cuda.set_device(1)
        on_device_1, on_device_0 = torch.ones(2, device="cuda"), torch.ones(2, device="cuda:0")
        assert (on_device_1.device.index, on_device_1.cuda(0).device.index) == (1, 0)
        with pytest.raises(RuntimeError, match="cuda:1, cuda:0"):
            on_device_1 + on_device_0
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
        assert torch.cuda.memory_allocated(1) == 8
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.zeros(1, device="cuda:2")


def test_new_threads_can_use_the_device(cuda):
    results = []
    thread = threading.Thread(
        target=lambda: results.append(torch.arange(3.0).to(cuda) + torch.ones(3, device=cuda))
    )
    thread.start()
    thread.join()
    assert results[0].device == cuda
    assert results[0].tolist() == [1.0, 2.0, 3.0]


def test_streams_and_events_are_available(cuda):
    stream, begin, end = (
        torch.cuda.Stream(),
        torch.cuda.Event(enable_timing=True),
        torch.cuda.Event(enable_timing=True),
    )
    before = torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() is stream
        begin.record()
        stream.wait_stream(before)
    end.record()
    torch.cuda.synchronize()
    assert torch.cuda.current_stream() is before
    assert begin.elapsed_time(end) >= 0
    assert torch.cuda.get_device_properties(0).total_memory == 80 << 30
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.is_bf16_supported(including_emulation=False)


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_packed_attention_equals_attention_of_each_sequence(cuda, window):
    torch.manual_seed(0)
    lengths, bounds = [5, 1, 3], torch.tensor([0, 5, 6, 9], dtype=torch.int32)
    query, key, value = (torch.randn(9, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    packed = [x.detach().to(cuda).requires_grad_() for x in (query, key, value)]
    out = varlen_attn(
        *packed, bounds.to(cuda), bounds.to(cuda), 5, 5, window_size=window, enable_gqa=True
    )
    expected = []
    for parts in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in parts)
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        seen = seen.triu(-window[0]) if window[0] >= 0 else seen
        attended = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, enable_gqa=True
        )
        expected.append(attended[0].transpose(0, 1))
    torch.testing.assert_close(out.cpu(), torch.cat(expected))
    weight = torch.randn(9, 4, 8)
    (out * weight.to(cuda)).sum().backward()
    (torch.cat(expected) * weight).sum().backward()
    for theirs, ours in zip(packed, (query, key, value), strict=True):
        torch.testing.assert_close(theirs.grad.cpu(), ours.grad)


def test_collectives_work_on_device_tensors():
    def work(rank):
        with pretend_cuda() as device:
            value = torch.full((3,), rank + 1.0, device=device)
            torch.distributed.all_reduce(value)
            parts = [torch.zeros(1, device=device) for _ in range(2)]
            torch.distributed.all_gather(parts, torch.tensor([float(rank)], device=device))
            weight = torch.ones(2, device=device, requires_grad=True)
            (weight * value[:2]).sum().backward()
            return {
                "sum": value.tolist(),
                "parts": [p.tolist() for p in parts],
                "grad": weight.grad.tolist(),
                "devices": [str(value.device), str(parts[1].device)],
            }

    for answer in run_on_ranks(2, work):
        assert answer == {
            "sum": [3.0] * 3,
            "parts": [[0.0], [1.0]],
            "grad": [3.0, 3.0],
            "devices": ["cuda:0"] * 2,
        }


def test_everything_is_restored_after_the_context():
    answers = torch.cuda.is_available, torch.cuda.Stream, torch.Generator, torch.utils.swap_tensors
    with pretend_cuda() as device:
        assert torch.cuda.is_available()
        tensor = torch.ones(2, device=device)
        with pytest.raises(RuntimeError, match="in use already"), pretend_cuda():
            pass
    assert (
        torch.cuda.is_available,
        torch.cuda.Stream,
        torch.Generator,
        torch.utils.swap_tensors,
    ) == answers
    assert not torch.cuda.is_available()
    assert not torch.__future__.get_swap_module_params_on_conversion()
    weight = torch.ones(2, requires_grad=True)
    (weight * 2).sum().backward()
    with pytest.raises(RuntimeError, match="outside of"):
        tensor + 1
