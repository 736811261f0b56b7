import math

import pytest
import torch

from tevatron.trainer.program.losses.listnet import listnet
from tevatron.trainer.program.losses.temperatures import Temperatures


def test_hand_arithmetic():
    # Teacher (3/4, 1/4), model (1/2, 1/2): the cross entropy is log 2.
    teacher = torch.tensor([[math.log(3.0), 0.0]])
    got = listnet(torch.zeros(1, 2), teacher, Temperatures())
    assert got.item() == pytest.approx(math.log(2.0), abs=1e-6)


def test_equals_torchs_cross_entropy_with_soft_labels():
    scores = torch.tensor([[0.3, -1.0, 2.0], [1.0, 0.0, 0.5]])
    teacher = torch.tensor([[4.0, 1.0, -2.0], [0.0, 0.0, 3.0]])
    expected = torch.nn.functional.cross_entropy(scores / 0.5, (teacher / 2.0).softmax(-1))
    got = listnet(scores, teacher, Temperatures(student=0.5, teacher=2.0)).mean()
    assert got.item() == pytest.approx(expected.item(), abs=1e-6)
