"""Builder of the `ref` application. Serve reads the annotation at run time to validate `args`."""

from ray.serve import Application

from relax.config.sections import TEACHER_PREFIX, RefArgs
from services.ref.deployment import Ref, Teacher


def build(args: RefArgs) -> Application:
    teachers = [
        Teacher.options(  # type: ignore[attr-defined]
            name=f"{TEACHER_PREFIX}{name}", ray_actor_options={"num_cpus": teacher.num_cpus}
        ).bind(args, name)
        for name, teacher in args.ref.teachers.items()
    ]
    return Ref.bind(args, *teachers)  # type: ignore[attr-defined]
