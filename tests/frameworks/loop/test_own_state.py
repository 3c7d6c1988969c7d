"""Which entries are different things on different ranks."""

from holter.frameworks.loop.own_state import Piece, divide


def test_what_is_equal_on_all_ranks_is_one_thing() -> None:
    found = divide({0: {"a": Piece("x")}, 1: {"a": Piece("x")}}, 0)
    assert ({}, False) == (found.labels, found.is_split)


def test_what_differs_is_called_by_the_first_rank_that_has_it() -> None:
    held = {rank: {"a": Piece(content)} for rank, content in enumerate("xyxy")}
    found = divide(held, 0)
    assert {"a": {0: 0, 1: 1, 2: 0, 3: 1}} == found.labels
    assert ([0, 1, 2, 3], True) == (found.ranks, found.is_split)


def test_what_another_rank_alone_holds_keeps_its_name_and_is_split() -> None:
    found = divide({0: {"a": Piece("x")}, 1: {"b": Piece("y")}}, 0)
    assert ({}, True) == (found.labels, found.is_split)


def test_shards_of_one_mesh_are_one_tensor_and_those_of_another_are_not() -> None:
    def stage(ranks: tuple[int, int], contents: str) -> dict[int, dict[str, Piece]]:
        return {
            rank: {"a": Piece(content, (4 * place,), ranks)}
            for place, (rank, content) in enumerate(zip(ranks, contents, strict=True))
        }

    assert {} == divide(stage((0, 1), "xy"), 0).labels
    apart = divide(stage((0, 1), "xy") | stage((2, 3), "zw"), 0)
    assert {"a": {0: 0, 1: 0, 2: 2, 3: 2}} == apart.labels
    copies = divide(stage((0, 1), "xy") | stage((2, 3), "xy"), 0)
    assert {} == copies.labels, "replicas that nobody declared hold the same"


def test_statistics_that_each_rank_has_of_its_own_keep_their_name() -> None:
    def held(weights: str) -> dict[int, dict[str, Piece]]:
        return {
            rank: {"mean": Piece(f"float32 (4,) {rank}", is_buffer=True), "weight": Piece(f"float32 (4,) {weight}")}
            for rank, weight in enumerate(weights)
        }

    assert {} == divide(held("xx"), 0).labels, "one model: scripts load its buffers by their names"
    assert {"mean", "weight"} == divide(held("xy"), 0).labels.keys(), "two models"
