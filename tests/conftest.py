"""For all tests."""

from hypothesis import settings

settings.register_profile("relax", deadline=None)  # no test asserts a time
settings.load_profile("relax")
