# moecore with all that its tests and docs need, on the CPU:
#     docker build -t moecore . && docker run -it -p 5000:5000 moecore
# On a GPU, begin from an image with your CUDA and torch, and call `make setup` there.
FROM python:3.11-slim-bookworm
RUN apt-get update && apt-get install --yes --no-install-recommends git make gcc libc6-dev chromium
WORKDIR /moecore
COPY . .
RUN make setup data && rm -rf /var/lib/apt/lists/*
ENV PATH="/moecore/.venv/bin:$PATH"
CMD ["bash"]
