"""Custom ops of AttnQuant for MAX."""

from .generated_linear import GeneratedLinear
