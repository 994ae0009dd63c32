"""Recommend a precision for a model on a device. Import `advise` from `amp_lab`."""

from amp_lab.advisor.candidates import Candidate
from amp_lab.advisor.outlook import forecast, trace_and_forecast
from amp_lab.advisor.result import Advice
from amp_lab.advisor.session import advise, measured

__all__ = ["Advice", "Candidate", "advise", "forecast", "measured", "trace_and_forecast"]
