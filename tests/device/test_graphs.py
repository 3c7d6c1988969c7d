"""Capture records and runs nothing; a replay runs what was recorded; what CUDA refuses while it captures is refused."""

import fake_cuda
import pytest
import torch

pytestmark = pytest.mark.device


def captured(body, **options) -> tuple[torch.cuda.CUDAGraph, object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        result = body()
    return graph, result


def test_a_capture_runs_nothing_and_a_replay_all_of_it() -> None:
    x = torch.zeros(4, device="cuda")
    graph, y = captured(lambda: x.add_(1) * 10)
    assert [0.0] * 4 == x.tolist()
    for times in (1, 2):
        graph.replay()
        assert ([float(times)] * 4, [10.0 * times] * 4) == (x.tolist(), y.tolist())


def test_a_replay_is_queued_like_any_work() -> None:
    x = torch.zeros(4, device="cuda")
    graph, _ = captured(lambda: x.add_(1))
    with fake_cuda.closed():
        graph.replay()
        x.mul_(5)
    assert [5.0] * 4 == x.tolist()


def test_a_whole_training_step_is_replayed() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)
    x = torch.randn(4, 8, device="cuda")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph, loss = captured(step)
    losses = []
    for _ in range(5):
        graph.replay()
        losses.append(loss.item())
    assert sorted(losses, reverse=True) == losses
    assert 8.0 == next(iter(optimizer.state.values()))["step"].item()


def test_a_stream_that_waits_for_a_captured_event_is_captured_too() -> None:
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()

    def body() -> torch.Tensor:
        x.add_(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            y = x * 2
        torch.cuda.current_stream().wait_stream(side)
        return y

    graph, y = captured(body)
    assert not torch.cuda.is_current_stream_capturing()
    graph.replay()
    assert [2.0] * 4 == y.tolist()


def test_work_that_does_not_come_back_is_an_error() -> None:
    x, side = torch.zeros(4, device="cuda"), torch.cuda.Stream()

    def body() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)

    with pytest.raises(RuntimeError, match="unjoined work"):
        captured(body)
    assert not torch.cuda.is_current_stream_capturing()
    assert [0.0] * 4 == x.tolist()


@pytest.mark.parametrize(
    "refused",
    [
        lambda x, _: x.sum().item(),
        lambda x, _: x.cpu(),
        lambda x, _: x.copy_(torch.ones(4)),
        lambda *_: torch.empty(3, pin_memory=True),
        lambda *_: torch.cuda.synchronize(),
        lambda *_: torch.cuda.current_stream().synchronize(),
        lambda _, event: event.query(),
        lambda _, event: event.synchronize(),
        lambda _, event: torch.cuda.current_stream().wait_event(event),
        lambda x, _: x.nonzero(),
        lambda *_: torch.cuda.current_stream().record_event().query(),
    ],
    ids=["item", "to host", "to device", "pin", "sync", "stream sync", "query", "event sync", "uncaptured", "nonzero", "captured"],
)
def test_what_cuda_refuses_in_a_capture_spoils_it(refused) -> None:
    x = torch.zeros(4, device="cuda")
    event = torch.cuda.current_stream().record_event()
    with pytest.raises(RuntimeError, match="CUDA error"):
        captured(lambda: refused(x, event))
    assert not torch.cuda.is_current_stream_capturing()
    assert [1.0] * 4 == (x + 1).tolist()


def test_relaxed_captures_allow_queries_and_the_default_stream_is_never_captured() -> None:
    event = torch.cuda.current_stream().record_event()
    fake_cuda.drain()
    captured(event.query, capture_error_mode="relaxed")
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_memory_of_a_graph_is_its_own() -> None:
    x = torch.zeros(1000, device="cuda")
    graph, y = captured(lambda: (x + 1) * 2)
    others = [torch.full((1000,), 9.0, device="cuda") for _ in range(10)]
    graph.replay()
    assert 2000.0 == y.sum().item()
    assert all(9000.0 == other.sum().item() for other in others)


def test_what_is_freed_during_a_capture_is_not_filled_by_replays() -> None:
    kept, x = [torch.zeros(500, device="cuda")], torch.zeros(4, device="cuda")

    def body() -> None:
        x.add_(1)
        kept.clear()

    graph, _ = captured(body)
    other = torch.ones(500, device="cuda")
    graph.replay()
    assert 500.0 == other.sum().item()


def test_each_replay_draws_new_numbers_and_moves_the_state() -> None:
    torch.cuda.manual_seed_all(1)
    graph, y = captured(lambda: torch.randn(6, device="cuda"))
    states, drawn = [torch.cuda.get_rng_state()], []
    for _ in range(2):
        graph.replay()
        drawn.append(y.tolist())
        states.append(torch.cuda.get_rng_state())
    assert drawn[0] != drawn[1]
    assert not torch.equal(states[0], states[1])
    torch.cuda.set_rng_state(states[0])
    graph.replay()
    assert drawn[0] == y.tolist()


def test_collectives_and_kernels_in_a_graph_are_nodes_of_it() -> None:
    graph, _ = captured(lambda: torch.cuda._sleep(10))
    assert ["sleep"] == graph.node_names()


def test_make_graphed_callables() -> None:
    model = torch.nn.Linear(4, 4).cuda()
    x = torch.randn(2, 4, device="cuda", requires_grad=True)
    expected = model(x).sum().item()
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    assert expected == pytest.approx(graphed(x).sum().item(), rel=1e-5)
