import numpy as np

def pack(
    rows: np.ndarray,
    places: np.ndarray,
    traits: np.ndarray,
    chosen: np.ndarray,
    size: int,
    thresholds: tuple[float, float, float, float],
    /,
) -> tuple[int, bytes, bytes, bytes, bytes, float, float]: ...
def outline(rows: np.ndarray, /) -> tuple[bool, bool, float]: ...
