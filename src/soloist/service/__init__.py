"""Soloist as a systemd user service: one unit, several profiles, one of them on the card at a time.

unit      the text of the unit file
manage    install, status, uninstall, and switching profiles
card      waiting until the card is really free
"""
