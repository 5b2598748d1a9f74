"""The training loop is explicit: few of our functions lie between the outer loop and the backward pass."""

import traceback
from pathlib import Path

import torch

from tests.support.helpers import Recorder, tiny_cluster

ROOT = Path(__file__).resolve().parents[2]
LARGEST_DEPTH = 11


def test_few_frames_lie_between_the_outer_loop_and_the_backward_pass(monkeypatch):
    depths = []
    backward = torch.Tensor.backward

    def measured(self, *arguments, **keywords):
        ours = [
            frame.name
            for frame in traceback.extract_stack()
            if Path(frame.filename).is_relative_to(ROOT)
            and not Path(frame.filename).is_relative_to(ROOT / "tests")
            and ".venv" not in frame.filename
        ]
        depths.append(ours[ours.index("train") :])
        return backward(self, *arguments, **keywords)

    monkeypatch.setattr(torch.Tensor, "backward", measured)
    tiny_cluster(number_of_outer_steps=1).train(Recorder())
    assert depths
    deepest = max(depths, key=len)
    assert len(deepest) <= LARGEST_DEPTH, deepest
