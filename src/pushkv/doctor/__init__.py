"""What is installed, whether it works, and what to do about what does not. See `examine`."""

from .finding import Finding, Verdict, worst
from .rounds import Patient, examine

__all__ = ["Finding", "Patient", "Verdict", "examine", "worst"]
