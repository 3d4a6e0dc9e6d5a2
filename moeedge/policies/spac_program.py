"""Policy spac-program: MoE-SpAc as its published program updates utilities, which is not as Algorithm 1 is printed.

Algorithm 1 compares the activations of a step with those of the step before, d = f_t - f_{t-1}. The program (repository
lshAlgorithm/MoE-SpAc, ggml/src/ggml-backend.cpp, StateMachine::update) compares them with the utility itself,
d = f_t - s_t, and steps s up or down by it: s follows the frequency instead of summing the signs of its changes. This
alone takes the printed rule past a binary estimator, and Table 4 of the paper into its order (docs/simulation.md).

All else is spac-paper: the paper's boundaries, K, tau and residency. The program has fixed boundaries (5 up, 1 down),
K = 5 and tau = 1.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeedge.policies.spac_paper import SpacPaper
from moeedge.scheduler.policy import Observation


class SpacProgram(SpacPaper):
    """See the module."""

    name = "spac-program"

    def observe(self, observation: Observation) -> None:
        """One step, in which the utility stands where Algorithm 1 has the last step's activations."""
        self._state = replace(self._state, counts=self._state.utility.astype(np.int32))
        super().observe(observation)
