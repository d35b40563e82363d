"""JSON schema of job files, generated from the types of `Job`.

    ephemeron schema job > job.schema.json

The wheel holds it as `ephemeron/schemas/job.schema.json`. Editors with Taplo complete and check a TOML file whose first line
is `#:schema ./job.schema.json`; a JSON file names it under `$schema`.
"""

from __future__ import annotations

import json

from ephemeron.config.schema import schema_of
from ephemeron.training.job.spec import PROGRAMS, Job


def job_schema() -> str:
    """The schema as indented JSON."""
    schema = schema_of(Job, title="ephemeron job", optional=("name",))
    schema["oneOf"] = [{"required": [name]} for name in PROGRAMS]
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
