"""QUANTIZE is the method of the checkpoint, by its own name or by TGI's; another one is refused."""

from typing import Any

import pytest

from common.settings.settings import SettingError, Settings
from gpu_worker.engine.model.config import check_quantize

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.mark.parametrize(
    ("quantization", "asked"),
    [
        (NF4, "bitsandbytes-nf4"),
        (NF4, "bitsandbytes"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-fp4"),
        (INT8, "bitsandbytes"),
        ({"quant_method": "fbgemm_fp8"}, "fbgemm-fp8"),
        (NF4, None),
        (None, None),
        (None, "fp8"),
        (None, "bitsandbytes"),
        (None, "eetq"),
    ],
)
def test_the_checkpoints_own_method_is_served(quantization: dict[str, Any] | None, asked: str | None) -> None:
    check_quantize(quantization, Settings.read([], {"QUANTIZE": asked} if asked else {}))


@pytest.mark.parametrize(
    ("quantization", "asked", "cause"),
    [
        (NF4, "bitsandbytes-fp4", "weights are loaded as the checkpoint has them (bitsandbytes-nf4)"),
        (INT8, "bitsandbytes-nf4", "weights are loaded as the checkpoint has them (bitsandbytes)"),
        (NF4, "awq", "weights are loaded as the checkpoint has them (bitsandbytes-nf4)"),
        (
            None,
            "gptq",
            "this checkpoint's weights are plain; `tokenfleet quantize MODEL OUT --method gptq` makes such a "
            "checkpoint",
        ),
        (
            None,
            "hqq",
            "this checkpoint's weights are plain; fp8, bitsandbytes, bitsandbytes-nf4, bitsandbytes-fp4, "
            "eetq are made of such at load",
        ),
    ],
)
def test_another_method_is_refused(quantization: dict[str, Any] | None, asked: str, cause: str) -> None:
    with pytest.raises(SettingError) as refusal:
        check_quantize(quantization, Settings.read([], {"QUANTIZE": asked}))
    assert str(refusal.value) == f"QUANTIZE: {asked} is not served: {cause}"
