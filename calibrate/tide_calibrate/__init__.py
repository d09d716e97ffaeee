"""Teach a frozen model where its tokens may stop: exit heads, routers, thresholds with a certificate, and what they gain."""
