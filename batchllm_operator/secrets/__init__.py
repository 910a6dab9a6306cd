"""Credentials: found in job specs, and masked in text that is shown."""

from batchllm_operator.secrets.finding import holds_credentials as holds_credentials
from batchllm_operator.secrets.masking import Masker as Masker
