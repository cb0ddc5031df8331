"""Static scales of keys and values from calibration."""

from __future__ import annotations

import pytest
import torch
from mt_quant import CalibrationError, KVCalibrator, KVFormat, QuantizationError

INT8, FP8 = KVFormat.named("int8-head"), KVFormat.named("fp8-tensor")


def test_each_head_of_each_layer_has_scales_of_its_keys_and_values() -> None:
    generator = torch.Generator().manual_seed(0)
    calibrator, batches = KVCalibrator(), []
    for _ in range(3):
        key, value = torch.randn(2, 2, 5, 4, 8, generator=generator)
        key[:, :, 2] *= 50
        batches.append((key, value))
        calibrator.update("a", key, value)
        calibrator.update("b", 2 * key, value[..., :3])
    scales = calibrator.scales(INT8)
    keys = torch.cat([key for key, _ in batches]).abs().amax((0, 1, 3))
    values = torch.cat([value for _, value in batches]).abs().amax((0, 1, 3))
    torch.testing.assert_close(scales["a"].key, keys / 127)
    torch.testing.assert_close(scales["a"].value, values / 127)
    torch.testing.assert_close(scales["b"].key, 2 * keys / 127)
    whole = calibrator.scales(FP8)["a"]
    torch.testing.assert_close(whole.key, (keys.max() / 448).expand(4))


def test_a_head_without_keys_has_scale_one_and_bad_ones_name_the_layer() -> None:
    calibrator = KVCalibrator()
    with pytest.raises(CalibrationError, match="no keys"):
        calibrator.scales(INT8)
    calibrator.update("a", torch.zeros(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    assert calibrator.scales(INT8)["a"].key.tolist() == [1, 1, 1]
    with pytest.raises(QuantizationError, match="a: value has shape"):
        calibrator.update("a", torch.ones(1, 2, 3, 4), torch.ones(1, 2, 2, 4))
    with pytest.raises(QuantizationError, match="a: key has shape"):
        calibrator.update("a", torch.ones(1, 2, 2, 4), torch.ones(1, 2, 2, 4))
    with pytest.raises(CalibrationError, match=r"b: .*not finite"):
        calibrator.update("b", torch.full((1, 2, 2, 4), float("nan")), torch.ones(1, 2, 2, 4))
