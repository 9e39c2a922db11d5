"""Tests of mlxtune serve."""
