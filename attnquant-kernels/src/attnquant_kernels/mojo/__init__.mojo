"""Custom ops of AttnQuant for MAX. There are none yet."""
