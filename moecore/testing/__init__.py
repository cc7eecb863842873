"""Checks of a part's promises, called in one line of a test: `check_router(Cosine)`.

Each raises AssertionError with the part's name and the broken promise.
"""

from moecore.conformance.targets import Target as Target
from moecore.testing.data_and_evaluation_checks import check_attack as check_attack
from moecore.testing.data_and_evaluation_checks import check_calculation as check_calculation
from moecore.testing.data_and_evaluation_checks import check_calibrator as check_calibrator
from moecore.testing.data_and_evaluation_checks import check_measurement as check_measurement
from moecore.testing.data_and_evaluation_checks import check_source as check_source
from moecore.testing.data_and_evaluation_checks import check_source_preview as check_source_preview
from moecore.testing.data_and_evaluation_checks import check_task as check_task
from moecore.testing.model_and_loss_checks import check_backbone as check_backbone
from moecore.testing.model_and_loss_checks import check_balance as check_balance
from moecore.testing.model_and_loss_checks import check_experts as check_experts
from moecore.testing.model_and_loss_checks import check_regularizer as check_regularizer
from moecore.testing.model_and_loss_checks import check_router as check_router
from moecore.testing.model_and_loss_checks import check_teacher as check_teacher
