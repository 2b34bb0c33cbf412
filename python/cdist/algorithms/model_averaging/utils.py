"""The averages themselves."""

from cdist.parallel.averaging import (
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]
