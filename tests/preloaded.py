"""What the server of tests/forked.py has done when it forks: all that a command does before it computes."""

import gc

import hydra.main
import hydra_plugins.hydra_joblib_launcher.joblib_launcher
import joblib
import pytest
import sklearn.datasets
import sklearn.metrics
import timm
import torch._dynamo
import torch.distributed
from hydra import compose, initialize_config_dir

import pubsel.cli
import pubsel.release.run
from hydra_plugins import pubsel_launchers
from pubsel.settings import CONF

pubsel_launchers.register()  # Hydra looks for its plugins
with initialize_config_dir(str(CONF), version_base="1.3"):
    compose("run", ["+experiment=quickstart"])
gc.freeze()

__all__ = ["hydra", "hydra_plugins", "joblib", "pubsel", "pytest", "sklearn", "timm", "torch"]
