"""Loaded by SGLang in the scheduler process, before the pool is built."""

import json
import os

from error_oracle import plant
from roomy_models.byte_mla import EntryClass  # noqa: F401

plant(os.environ["TEST_VALUES"], **json.loads(os.environ["TEST_FAULTS"]))
