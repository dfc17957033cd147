"""Service classes: which requests are served before others."""

SERVICE_CLASSES = ("interactive", "standard", "batch")
"""The most urgent first."""
LEAST_URGENT = len(SERVICE_CLASSES) - 1
"""The index of the class `batch`."""
DEFAULT_CLASS = "standard"
CLASS_INDEXES = {name: index for index, name in enumerate(SERVICE_CLASSES)}


def service_class(class_name: str) -> str:
    """The class of a request; one that names none, or one that is not known here, has the default."""
    return class_name if class_name in SERVICE_CLASSES else DEFAULT_CLASS


def class_index(class_name: str) -> int:
    """The index of a request's class: 0 is the most urgent."""
    return CLASS_INDEXES.get(class_name, CLASS_INDEXES[DEFAULT_CLASS])
