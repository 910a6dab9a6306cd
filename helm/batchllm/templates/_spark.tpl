{{/* The SparkApplication of plan for Airflow's application_file. The operator adds its name and the driver's arguments. */}}
{{- define "batchllm.sparkApplication" -}}
{{- $spark := .Values.spark -}}
apiVersion: sparkoperator.k8s.io/v1beta2
kind: SparkApplication
metadata:
  namespace: {{ .Release.Namespace | quote }}
spec:
  type: Python
  pythonVersion: "3"
  sparkVersion: "4.3.0"
  mode: cluster
  image: {{ include "batchllm.image" (dict "root" . "image" "spark") | quote }}
  imagePullPolicy: {{ .Values.images.pullPolicy }}
  {{- with .Values.images.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  mainApplicationFile: local:///opt/batchllm/plan.py
  restartPolicy:
    type: Never
  timeToLiveSeconds: {{ int64 .Values.pods.activeDeadlineSeconds }}
  {{- $conf := dict "spark.log.level" "WARN" "spark.stage.maxConsecutiveAttempts" "16" }}
  sparkConf:
    {{- range $name, $value := merge (dict) $spark.conf $conf }}
    {{ $name | quote }}: {{ $value | quote }}
    {{- end }}
  volumes:
    {{- include "batchllm.volumes" . | nindent 4 }}
    - name: work
      emptyDir: {}
    - name: spark-local-dir-1
      emptyDir:
        sizeLimit: {{ $spark.executor.scratch | quote }}
  driver:
    cores: {{ int64 $spark.driver.cores }}
    memory: {{ $spark.driver.memory | quote }}
    memoryOverhead: {{ $spark.driver.memoryOverhead | quote }}
    {{- include "batchllm.sparkPod" . | nindent 4 }}
  executor:
    instances: {{ int64 $spark.executor.instances }}
    cores: {{ int64 $spark.executor.cores }}
    memory: {{ $spark.executor.memory | quote }}
    memoryOverhead: {{ $spark.executor.memoryOverhead | quote }}
    {{- include "batchllm.sparkPod" . | nindent 4 }}
{{- end -}}

{{/* What driver and executors have in common. */}}
{{- define "batchllm.sparkPod" -}}
{{- $spark := .Values.spark -}}
serviceAccount: {{ include "batchllm.serviceAccountName" (dict "root" . "kind" "spark") | quote }}
labels:
  {{- $labels := dict "app.kubernetes.io/name" "batchllm" "app.kubernetes.io/component" "spark" }}
  {{- toYaml (merge $labels .Values.pods.labels) | nindent 2 }}
{{- with .Values.pods.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "batchllm.priorityClassName" . }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $spark.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $spark.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
env:
  {{- include "batchllm.env" . | trim | nindent 2 }}
{{- with include "batchllm.envFrom" (dict "root" . "kind" "cpu") }}
envFrom:
  {{- trim . | nindent 2 }}
{{- end }}
podSecurityContext:
  {{- include "batchllm.podSecurityContext" (dict "root" . "user" $spark.runAsUser "group" $spark.runAsGroup) | nindent 2 }}
securityContext:
  {{- include "batchllm.containerSecurityContext" . | nindent 2 }}
volumeMounts:
  {{- include "batchllm.volumeMounts" . | nindent 2 }}
  - name: work
    mountPath: /opt/spark/work-dir
  - name: spark-local-dir-1
    mountPath: /var/data/spark
{{- end -}}
