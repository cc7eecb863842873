import pytest
import torch

from moecore.nn.layers.positions import resize_positions


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_special_tokens_stay_and_a_constant_grid_stays_constant(mode):
    positions = torch.cat([torch.full((1, 2, 4), 7.0), torch.full((1, 9, 4), 3.0)], dim=1)
    resized = resize_positions(positions, prefix=2, size=(5, 5), mode=mode)
    assert resized.shape == (1, 27, 4)
    torch.testing.assert_close(resized[:, :2], positions[:, :2])
    torch.testing.assert_close(resized[:, 2:], torch.full((1, 25, 4), 3.0))


def test_a_row_gradient_runs_along_rows():
    # a 2×2 grid holding 0, 0 / 1, 1; bilinear to 4×4 with half-pixel centres: rows at 0, 1/4, 3/4,
    # 1
    positions = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 4, 1)
    resized = resize_positions(positions, prefix=0, size=(4, 4)).view(4, 4)
    torch.testing.assert_close(
        resized, torch.tensor([0.0, 0.25, 0.75, 1.0]).view(4, 1).expand(4, 4)
    )


def test_the_same_size_is_untouched_and_no_square_is_refused():
    positions = torch.randn(1, 5, 3)
    assert resize_positions(positions, prefix=1, size=(2, 2)) is positions
    with pytest.raises(ValueError, match="square"):
        resize_positions(torch.randn(1, 6, 3), prefix=1, size=(2, 2))
