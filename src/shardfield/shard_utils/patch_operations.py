"""Older scripts import this module for its effect. The rules are registered when shardfield is imported."""

from .. import ops as ops
