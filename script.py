import socket
def connect(host, port, kind=socket.SOCK_STREAM, block=True):
    client = socket.socket(socket.AF_INET, kind)
    client.setblocking(block)
    try: client.connect((host, port))
    except OSError as error: return error.strerror
    try: return client.recv(1)
    except OSError as error: return error.strerror
print(connect('203.0.113.2', 81), connect('203.0.113.2', 81, block=False))
# The server's own port, an address of names that was given to none, and a wish for a datagram.
print(connect('203.0.113.1', 46285), connect('198.18.0.77', 80))
print(connect('203.0.113.2', 123, socket.SOCK_DGRAM))
# Allowed, and nobody is there.
print(connect('203.0.113.2', 9))
