# The lab in a container: docker build -t lab . && docker run --rm -it lab ./launch.sh hybrid --steps 100
FROM python:3.12-slim
WORKDIR /lab
COPY . .
# The first launch prepares .venv/ from requirements.txt; the tests' packages are left out.
RUN LAB_TORCH=cpu ./launch.sh > /dev/null
CMD ["./launch.sh"]
