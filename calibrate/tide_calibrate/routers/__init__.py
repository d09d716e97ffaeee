"""Routers score whether a token may stop at a checkpoint. ``mlp`` is trained; the others use the exit head's logits."""

from __future__ import annotations

from tide_calibrate.routers.base import Router
from tide_calibrate.routers.mlp import MlpRouter
from tide_calibrate.routers.training_free import Entropy, MaxProbability

TRAINING_FREE: tuple[Router, ...] = (MaxProbability(), Entropy())

__all__ = ["TRAINING_FREE", "Entropy", "MaxProbability", "MlpRouter", "Router"]
